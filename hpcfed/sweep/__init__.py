"""Many runs of one recipe, a grid of settings × seeds, in one job or many: pulled by groups of ranks, then compared."""
