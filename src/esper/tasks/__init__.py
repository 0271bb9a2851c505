"""What hosts learn: data sets, hosts and instance suites."""
