# ijson, which Spack's own packages lack; beside py_hpcfed in the same repository.

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyIjson(PythonPackage):
    """Iterative JSON parser with standard Python iterator interfaces."""

    homepage = "https://github.com/ICRAR/ijson"
    pypi = "ijson/ijson-3.6.0.tar.gz"

    license("BSD-3-Clause AND ISC")

    version("3.6.0", sha256="ec8f9265524e724905ecf00bdd061c374baaa8d5045ef50425695fb06efb45f5")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
