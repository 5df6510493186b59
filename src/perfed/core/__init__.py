"""The contract everything else is built on; imports nothing from the other rooms."""
