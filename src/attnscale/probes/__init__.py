"""Probes: measure an already traced model inside its own run, eager or compiled.

A plan lists the attention calls of a model. `install` gives each of their modules a probed class while it is measured,
and `intercept` finds the attention calls inside it. A probe is one op at each call. It writes the numbers for Monitor
(`stats`) or QKClip (`maxima`) to a buffer on the model's device. The attention itself is unchanged.
"""
