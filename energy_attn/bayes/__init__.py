"""Conjugates, rate functions, MAP and saddle-point attention."""
