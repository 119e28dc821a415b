package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// shortHour is the length of a billing hour in TestBilling. A VM that body describes costs 11 units of credit per such
// hour while it runs, and 1 while it is stopped.
const shortHour = 4 * time.Second

// charges returns those transactions of the wallet that are charges for a VM.
func (w *world) charges(ctx context.Context, member int, id string) (all []charged) {
	data := w.credit(ctx, member, w.tenantToken, 200, http.MethodGet, "/api/v1/wallets/default/transactions", nil)
	text, err := json.Marshal(data["transactions"])
	require.NoError(w.t, err)
	var listed []charged
	require.NoError(w.t, json.Unmarshal(text, &listed))
	for _, c := range listed {
		if c.ResourceID == id && strings.HasSuffix(c.Type, "charge") {
			all = append(all, c)
		}
	}
	return all
}

type charged struct {
	Type        string `json:"transaction_type"`
	Amount      int64  `json:"amount"`
	Description string `json:"description"`
	ResourceID  string `json:"resource_id"`
}

// TestBilling checks that each hour of a VM is charged exactly once, also when the leader is killed and when no member
// runs for hours. It also checks that the VM is shut down when no credit is available, and can be started again when
// there is credit.
func TestBilling(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.trio.Extra = []string{
			"--billing-enabled", "--billing-vcpu-hour", "10", "--billing-disk-gib-hour", "1", "--billing-on-empty", "stop",
			"--billing-test-hour", shortHour.String(),
		}
	})
	w.startAgent()
	ctx := w.context(4 * time.Minute)
	images, err := lab.ImportGuest(ctx, w.trio, w.admin, guest(t))
	require.NoError(t, err)
	ada := w.rest(2, w.tenant("ada", "default", "default", "project:member"))
	wallet := func(member int) map[string]any {
		return w.credit(ctx, member, w.tenantToken, 200, http.MethodGet, "/api/v1/wallets/default", nil)
	}
	refused := func(method, path string, body any, says ...string) {
		t.Helper()
		a, err := ada.Do(ctx, 8084, method, path, body)
		require.NoError(t, err)
		require.Equal(t, http.StatusTooManyRequests, a.Status, a.Raw)
		require.Equal(t, "RESOURCE_EXHAUSTED", a.Error.Code)
		for _, part := range says {
			require.Contains(t, a.Error.Message, part)
		}
	}

	refused(http.MethodPost, "/api/v1/vms", body("web", images.Disk), "costs 11", "no wallet")
	w.credit(ctx, 1, w.adminToken, 201, http.MethodPost, "/api/v1/wallets", map[string]any{"project_id": "default", "org_id": "default", "initial_balance": 10})
	refused(http.MethodPost, "/api/v1/vms", body("web", images.Disk), "costs 11", "10 is available")
	w.credit(ctx, 1, w.adminToken, 200, http.MethodPost, "/api/v1/wallets/default/topup", map[string]any{"amount": 9990})
	var list struct{ VMs []lab.VM }
	require.NoError(t, ada.Call(ctx, http.MethodGet, "/api/v1/vms", nil, &list))
	require.Empty(t, list.VMs, "a refused VM must not exist")

	var vm lab.VM
	require.NoError(t, ada.Call(ctx, http.MethodPost, "/api/v1/vms", body("web", images.Disk), &vm))
	require.NoError(t, ada.Call(ctx, http.MethodPost, "/api/v1/vms/"+vm.ID+"/start", nil, nil))
	hours := func(n int) {
		t.Helper()
		require.NoError(t, lab.Until(ctx, fmt.Sprintf("%d hours are charged", n), func(ctx context.Context) error {
			a, err := w.rest(2, w.tenantToken).Do(ctx, creditPort, http.MethodGet, "/api/v1/wallets/default", nil)
			if err != nil {
				return err
			}
			if a.Status != http.StatusOK {
				return fmt.Errorf("%s", a.Raw)
			}
			if got := len(w.charges(ctx, 2, vm.ID)); got < n {
				return fmt.Errorf("%d hours are charged", got)
			}
			return nil
		}))
	}
	hours(2)
	running := func() bool {
		m := eventually(ctx, t, w.dial(2, w.adminToken), vm.ID, "the VM runs", func(m *vmv1.VirtualMachine) bool { return m.GetState() == vmv1.VmState_VM_STATE_RUNNING })
		return m.GetStatus().GetHostPid() != 0
	}
	require.True(t, running())

	// Kill the leader. The next leader must continue to charge.
	leader := w.leader(2)
	require.NoError(t, w.dir.Kill(w.trio.Name(leader)))
	if leader == 2 {
		require.NoError(t, w.trio.Start(2))
	}
	hours(5)
	if leader != 2 {
		require.NoError(t, w.trio.Start(leader))
	}
	w.ready()

	// Kill all members and start them again after three billing hours. These hours must be charged, and the guest must
	// still run.
	before := len(w.charges(ctx, 2, vm.ID))
	for id := range w.trio.Members {
		require.NoError(t, w.dir.Kill(w.trio.Name(id)))
	}
	down := time.Now()
	select {
	case <-time.After(3 * shortHour): // the members have no clock that the test could advance
	case <-ctx.Done():
	}
	require.NoError(t, w.trio.StartAll())
	w.ready()
	hours(before + int(time.Since(down)/shortHour))
	require.True(t, running())

	// The charges must be for consecutive hours, each of 11 units.
	all := w.charges(ctx, 3, vm.ID)
	t.Logf("%d hours are charged", len(all))
	var last time.Time
	for n, c := range all {
		require.EqualValues(t, 11, c.Amount, c.Description)
		from, found := strings.CutPrefix(c.Description, "VM web, hour from ")
		if n == 0 && c.Type == "charge" {
			require.Equal(t, "VM web, its first hour", c.Description)
			continue
		}
		require.True(t, found, c.Description)
		at, err := time.Parse(time.RFC3339, strings.Fields(strings.Split(from, ": ")[0])[0])
		require.NoError(t, err, c.Description)
		if !last.IsZero() {
			require.Equal(t, shortHour, at.Sub(last), "hour %d: %s", n, c.Description)
		}
		last = at
	}

	// Reserve all credit for other purposes. The VM must be shut down, and must not start until the credit is released.
	var held struct{ ID string }
	require.NoError(t, lab.Until(ctx, "all credit is reserved, between two hours", func(ctx context.Context) error {
		a, err := w.rest(2, w.tenantToken).Do(ctx, creditPort, http.MethodPost, "/api/v1/reservations",
			map[string]any{"project_id": "default", "amount": wallet(2)["available"], "ttl_seconds": 3600})
		if err != nil {
			return err
		}
		if a.Status != http.StatusCreated {
			return fmt.Errorf("%s", a.Raw)
		}
		return json.Unmarshal(a.Data, &held)
	}))
	stopped := eventually(ctx, t, w.dial(2, w.adminToken), vm.ID, "the VM is stopped", func(m *vmv1.VirtualMachine) bool { return m.GetState() == vmv1.VmState_VM_STATE_STOPPED })
	require.Empty(t, stopped.GetStatus().GetLastError())
	_, err = w.admin.Console(ctx, vm.ID, "TRIVET GUEST POWERBUTTON", 1)
	require.NoError(t, err, "the guest must be shut down by its power button")
	refused(http.MethodPost, "/api/v1/vms/"+vm.ID+"/start", nil, "costs 11", "owes")
	refused(http.MethodPost, "/api/v1/vms", body("more", images.Disk), "costs 11", "owes")
	w.credit(ctx, 2, w.tenantToken, 200, http.MethodPost, "/api/v1/reservations/"+held.ID+"/release", map[string]any{})
	require.NoError(t, ada.Call(ctx, http.MethodPost, "/api/v1/vms/"+vm.ID+"/start", nil, nil))
	require.True(t, running())

	require.NoError(t, ada.Call(ctx, http.MethodPost, "/api/v1/vms/"+vm.ID+"/stop", nil, nil))
	require.NoError(t, ada.Call(ctx, http.MethodDelete, "/api/v1/vms/"+vm.ID, nil, nil))
	require.NoError(t, lab.Until(ctx, "no credit is reserved for the VM", func(context.Context) error {
		if got := wallet(1); got["reserved"].(float64) != 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	}))
	out, errs, code := w.trivet(ctx, t.TempDir(), "wallet", "transactions", "--project", "default", "--token", w.tenantToken, "--endpoint", "127.0.0.3:50051")
	require.Zero(t, code, errs)
	require.Contains(t, out, "VM web, hour from ")
	metrics, err := http.Get("http://127.0.0.1:8084/metrics")
	require.NoError(t, err)
	defer metrics.Body.Close()
	exposed, err := io.ReadAll(metrics.Body)
	require.NoError(t, err)
	require.Contains(t, string(exposed), "trivet_credit_violations_total 0")
}
