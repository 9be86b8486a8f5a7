"""Handlers: parse, call dispatch, shape the answer. No semantics live here."""
