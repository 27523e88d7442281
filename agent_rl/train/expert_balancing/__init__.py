"""Balanced experts (ForeMoE): loads known from the routes, copies of experts, their transfer and the report."""
