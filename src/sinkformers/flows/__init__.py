"""The paper's theory: attention as maps of measures, their energies, flows, limits and closed forms."""

from sinkformers.flows.densities import Bump, Density, Gaussian
from sinkformers.flows.diffusion import DensityPath, Grid, heat, score_flow
from sinkformers.flows.energies import energy_infinity, energy_zero
from sinkformers.flows.gaussians import (
    Affine,
    energy_infinity_of_gaussian,
    energy_zero_of_gaussian,
    gaussian_path,
    sinkhorn_of_gaussian,
    softmax_of_gaussian,
)
from sinkformers.flows.integrators import (
    BOGACKI_SHAMPINE,
    DORMAND_PRINCE,
    EULER,
    HEUN,
    RK4,
    Path,
    Tableau,
    integrate,
)
from sinkformers.flows.limits import (
    HEAT_COEFFICIENT,
    PAPER_HEAT_COEFFICIENT,
    ScoreVelocity,
    first_order_limit,
    paper_sinkformer_limit,
    paper_transformer_limit,
    sinkformer_limit,
    transformer_limit,
)
from sinkformers.flows.maps import AttentionMap, Field
from sinkformers.flows.measure import Measure
from sinkformers.flows.potentials import Evidence
from sinkformers.flows.projections import Projections
from sinkformers.flows.trajectories import Trajectory, flow

__all__ = [
    "BOGACKI_SHAMPINE",
    "DORMAND_PRINCE",
    "EULER",
    "HEAT_COEFFICIENT",
    "HEUN",
    "PAPER_HEAT_COEFFICIENT",
    "RK4",
    "Affine",
    "AttentionMap",
    "Bump",
    "Density",
    "DensityPath",
    "Evidence",
    "Field",
    "Gaussian",
    "Grid",
    "Measure",
    "Path",
    "Projections",
    "ScoreVelocity",
    "Tableau",
    "Trajectory",
    "energy_infinity",
    "energy_infinity_of_gaussian",
    "energy_zero",
    "energy_zero_of_gaussian",
    "first_order_limit",
    "flow",
    "gaussian_path",
    "heat",
    "integrate",
    "paper_sinkformer_limit",
    "paper_transformer_limit",
    "score_flow",
    "sinkformer_limit",
    "sinkhorn_of_gaussian",
    "softmax_of_gaussian",
    "transformer_limit",
]
