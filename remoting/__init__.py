"""The wire: RocketMQ remoting frames and commands, and a thin trio server and client."""
