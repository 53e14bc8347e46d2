import logging

# It warns about a kernel that is not used here, also if only peft imports it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
