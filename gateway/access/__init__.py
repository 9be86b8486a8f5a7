"""Who asks, and what they may do.

auth          the key of a request
rules         what each address asks of a key
key_use       what keys use of their limits, on all shards together
origins       which host names are answered, and which web pages may use the server
"""
