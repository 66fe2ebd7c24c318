"""The draft store: answers that later requests are drafted from, in other daemons and after restarts, too."""
