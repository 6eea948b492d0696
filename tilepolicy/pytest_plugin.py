"""pytest support: a fixture, and a check that no test leaves a policy active."""
