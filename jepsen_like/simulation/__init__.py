"""The whole cluster inside one process on virtual time, repeatable from one seed."""
