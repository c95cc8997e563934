from tests.support.no_gpu import no_gpu as no_gpu
