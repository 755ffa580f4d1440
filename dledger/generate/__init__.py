"""Files for what runs and watches a cluster: Prometheus, Grafana, systemd, containers, Kubernetes.

Each module returns the texts of files by their names; nothing is read and nothing is written.
"""
