#!/bin/bash
printf '#!/bin/bash\necho $(($1 * ($1 + 1) / 2))\n' > sum.sh
chmod +x sum.sh
