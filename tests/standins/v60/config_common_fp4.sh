export FP4=True
export FP8=False
export FP4_PARAM_GATHER=0
