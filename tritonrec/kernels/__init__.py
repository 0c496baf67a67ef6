"""One folder per op: a typed public function, a reference, a CPU and a Triton implementation."""
