"""`tritonrec serve-bench`: lookups with a bounded lag beside synchronous ones."""
