# placeholder by the lead: replace this file whole
def resolve(headers, properties, options):
    return headers.get(options.tenant_header)
