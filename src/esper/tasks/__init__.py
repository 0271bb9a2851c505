"""Learning problems for hosts: data sets, hosts and suites of instances."""
