"""A fleet that is not there: control's own step and the policies' own replay on a virtual clock."""
