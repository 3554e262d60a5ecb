"""Looking at models from outside: parity with the authors' code, counts, probes."""
