"""Replicas: engines in Ray actors, on one machine or many. Ray places, restarts and finds them."""
