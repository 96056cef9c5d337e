"""One-job runners of forges on leased nodes: what the daemons for GitHub and Gitea share."""
