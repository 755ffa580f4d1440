"""What producers, consumers and admins share: messages, routes, connections, leaders, retries."""
