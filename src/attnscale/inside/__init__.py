"""A known model, measured inside its own run: eager or compiled, by the kernels it runs with anyhow.

A module that attends is given a class of its own for as long as it is looked at. Dynamo guards on classes, so a
compiled model has one more graph for it, and goes back and forth between the two with no further compilation. In that
graph stand two marks, around what the module does; while autograd and the compiler trace the graph, a function that
attends between them is seen with its arguments, and an operator that looks at queries and keys is put before it. The
attention itself stays as it was. In an eager run the same functions are looked at as they are called. Attention written
out is found by its operations, below autograd: a product of activations that comes to a softmax. What can be seen in
neither way is followed from outside, its module apart from all others.
"""
