"""Probes: measure a model that was traced before inside its own run, eager or compiled.

A plan says where a model attends. `install` gives each of these modules a probed class for as long as it is measured;
`intercept` finds the attention calls inside it; a probe is one op at each call, which writes what Monitor (`stats`) or
QKClip (`maxima`) asks for into a buffer on the model's device. The attention itself stays as it was.
"""
