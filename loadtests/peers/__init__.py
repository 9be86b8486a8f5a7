"""Compares streams with its alternatives: the same work, in one run on one machine.

install.py    finds the servers, or unpacks them into build/peers without root
servers.py    starts and stops each server
wires.py      the protocol of each server as bytes: a write, a page, a response
load.py       one process that sends these bytes, with the same loop for all servers
measuring.py  the workloads and the contenders
compare.py    `make compare`: rounds, medians and spread, the page and its plots
"""
