"""`jaxpipe demo`: train a byte-level decoder through a pipeline, beside the same training without.

`data` has the text, `model` the decoder, `plain` the un-pipelined training step, `sampling` the
generated text, `display` what is shown, and `program` puts them together. It is a program that
uses jaxpipe as anyone would: nothing in the rest of jaxpipe knows of it.
"""
