"""Names, boxes, records and batches: what the engine stores, independent of who sends it.

names, units, slots      legal names; numbers with units; the slot of a name
boxes, matches           the config of a box; the tag filter
records, binary_records  batches as bytes: JSON records, and binary records of the S2 API
stored_records           decodes stored records
job_fields               key, priority and time of jobs, as columns of a batch
"""
