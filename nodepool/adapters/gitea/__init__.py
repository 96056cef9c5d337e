"""Gitea Actions and Forgejo Actions: each job runs on a leased node."""
