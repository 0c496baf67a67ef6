"""`tritonrec train --slipstream`: runs with and without the dropped inputs, side by side."""
