"""GitHub Actions: runner scale sets whose runners are leased nodes."""
