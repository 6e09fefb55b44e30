"""One study per method: tasks, arms, metrics and claims. ``heedful study SLUG`` runs them."""
