from .syncobj import SyncObj as SyncObj
from .config import SyncObjConf as SyncObjConf
