#!/usr/bin/env bash
# Six hospitals send tables, each with an oddity of its own; on the way to a study's page and a predicted row.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

step "tables"
python "$clone/jobs/users/hospitals.py"
prepare=(hpcfed prepare own --raw raw --target outcome --test-fraction 0.25 -o six.h5)

step "what is refused, until north's header and the gaps are seen to"
refused "only it has 'Age', 'SEX'" "${prepare[@]}"
sed -i '1s/Age,SEX/age,sex/' raw/north.csv
refused "choose what to do by --missing" "${prepare[@]}"
"${prepare[@]}" --missing mean --standardize pooled

step "training on two ranks"
cat > six.yaml <<'YAML'
data: six.h5
model: {name: logistic}
rounds: 5
local: {epochs: 4, batch_size: 10, lr: 0.5}
algorithm: {name: fedavg}
evaluate: {metrics: [auroc]}
YAML
mpirun -n 2 hpcfed run six.yaml --quiet

step "new patients"
printf 'sex,age,stage,marker\nf,71,III,2.5\nm,45,I,-2.5\nm,45,I,NA\n' > new.csv
hpcfed predict runs/six new.csv -o predicted.csv
cat predicted.csv
grep -q '^dead,' <(sed -n 2p predicted.csv) && grep -q '^alive,' <(sed -n 3p predicted.csv)

step "done in $folder"
