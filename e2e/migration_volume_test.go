package e2e

import (
	"context"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Shell lines of a guest that writes the numbers 1, 2, 3 and so on to a disk, each to a sector of its own, and stores the
// last one that the disk has acknowledged as durable in the file count of a directory. The arguments are the directory and
// the disk. Each line can be repeated.
const (
	writeNumbers = "run d=%s; mkdir $d 2>/dev/null && { echo 0 >$d/count; (i=1; while [ ! -e $d/stop ]; do printf %%512d $i | " +
		"dd of=/dev/%s bs=512 seek=$((8192+i)) conv=notrunc,fsync || break; echo $i >$d/count; i=$((i+1)); done; touch $d/stopped) " +
		">/dev/null 2>&1 </dev/null & } ; [ $(cat $d/count) -gt 3 ] && printf 'WRITES %%s\\n' $d"
	moreNumbers = "run d=%s; [ -e $d/seen ] || cp $d/count $d/seen; [ $(cat $d/count) -gt $(($(cat $d/seen)+3)) ] && printf 'MORE %%s\\n' $d"
	keptNumbers = "run d=%s; touch $d/stop; while [ ! -e $d/stopped ]; do sleep 0.1; done; echo 3 >/proc/sys/vm/drop_caches; " +
		"dd if=/dev/%s bs=512 skip=8193 count=$(cat $d/count) 2>/dev/null | tr -s ' ' '\\n' | sed 1d | " +
		"awk -v n=$(cat $d/count) '$1 != NR {bad++} END {printf \"KEPT lost=%%d wrong=%%d\\n\", n-NR, bad}'"
)

// moveWithVolume migrates a VM, whose guest writes to a volume all the time, from one host to another one. The guest must
// continue to write at the target, and read every number that it has written.
func (w *world) moveWithVolume(ctx context.Context, vm, device string, from, to *lab.Agent) {
	t := w.t
	t.Helper()
	before := w.agent
	defer func() { w.agent = before }()
	_, err := w.admin.VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{
		OrgId: "default", ProjectId: "default", VmId: vm, Labels: map[string]string{"trivet/node-selector": ""},
	})
	require.NoError(t, err)
	target, err := w.admin.AwaitNode(ctx, to.Name)
	require.NoError(t, err)
	w.agent = from
	numbers := "/tmp/to-" + to.Name
	w.command(ctx, vm, fmt.Sprintf(writeNumbers, numbers, device), "WRITES "+numbers)
	began := time.Now()
	_, err = w.admin.VMs.MigrateVm(ctx, &vmv1.MigrateVmRequest{
		OrgId: "default", ProjectId: "default", VmId: vm, DestinationNodeId: target.GetId(),
	})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the VM runs on the other host", func(ctx context.Context) error {
		now, err := w.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", ProjectId: "default", VmId: vm})
		if err == nil && (now.GetState() != vmv1.VmState_VM_STATE_RUNNING || now.GetNodeId() != target.GetId()) {
			err = fmt.Errorf("it is %v on %s: %s", now.GetState(), now.GetNodeId(), now.GetStatus().GetLastError())
		}
		return err
	}))
	t.Logf("the VM was migrated with its volume in %v", time.Since(began))
	w.agent = to
	w.command(ctx, vm, fmt.Sprintf(moreNumbers, numbers), "MORE "+numbers)
	w.command(ctx, vm, fmt.Sprintf(keptNumbers, numbers, device), "KEPT lost=0 wrong=0")
}
