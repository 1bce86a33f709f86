"""The memory that models need, the budget, and which models fit."""
