"""Operations of a running model -> where each tensor came from; knows no model."""
