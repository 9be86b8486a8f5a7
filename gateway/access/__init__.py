"""Authentication and authorization of requests.

auth          finds the key of a request
rules         the scopes and names that each route requires of a key
key_use       usage of keys against their limits, over all shards
origins       which host names are answered, and which web pages may use the server
"""
