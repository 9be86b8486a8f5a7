"""The same work done by us and by what people would use instead, in one run on one machine.

install.py    finds the servers, or unpacks them into build/peers without being root
servers.py    starts and stops each, says its version and how durable it is set
wires.py      each server's own protocol: a write, a page, an answer, as bytes
load.py       one process that sends those bytes; the same loop for all, ours included
measuring.py  what is measured, and by whom
compare.py    `make compare`: who goes when, medians and spread, the page and its plots
"""
