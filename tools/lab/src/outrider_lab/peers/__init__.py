"""Other engines, behind one small contract, for comparisons with Outrider. Nothing that serves imports this package."""
