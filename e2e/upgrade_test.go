package e2e

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// writeDataEnv is the environment variable with the path to which TestWriteDataOfThisVersion writes an archive of the
// members' data directories.
const writeDataEnv = "TRIVET_WRITE_DATA"

// TestDataOfEarlierVersions starts members of this version with data directories of earlier versions, and checks that
// every kind of record can be read and changed. Each archive in testdata/data was written by
// TestWriteDataOfThisVersion with the programs of the commit in its name.
func TestDataOfEarlierVersions(t *testing.T) {
	archives, err := filepath.Glob("testdata/data/*.tar.zst")
	require.NoError(t, err)
	require.NotEmpty(t, archives)
	for _, archive := range archives {
		t.Run(strings.TrimSuffix(filepath.Base(archive), ".tar.zst"), func(t *testing.T) {
			w := newWorld(t, func(w *world) { w.unpack(archive) })
			w.checkRecords()
			w.checkChanges()
		})
	}
}

// TestWriteDataOfThisVersion writes an archive of data directories for TestDataOfEarlierVersions, and checks the
// records in them. To add an archive for a version, run it as root with the programs of that version in TRIVET_BIN:
//
//	TRIVET_BIN=… TRIVET_WRITE_DATA=$PWD/e2e/testdata/data/COMMIT.tar.zst go test ./e2e -run WriteDataOfThisVersion
func TestWriteDataOfThisVersion(t *testing.T) {
	path := os.Getenv(writeDataEnv)
	if path == "" {
		path = filepath.Join(t.TempDir(), "data.tar.zst")
	}
	w := newWorld(t)
	w.fill()
	w.checkRecords()
	require.NoError(t, w.trio.StopAll())
	w.pack(path)
}

// fill creates at least one record of each kind, such as a VM, an image, a wallet and a key.
func (w *world) fill() {
	t, ctx := w.t, w.context(time.Minute)
	w.startAgent()
	token := w.tenant("ada", "acme", "shop", "project:member")

	disk := filepath.Join(w.trio.ImportDir(), "empty.raw")
	require.NoError(t, os.WriteFile(disk, make([]byte, 1<<20), 0o644))
	image, err := lab.ImportURL(ctx, w.admin, &vmv1.CreateImageRequest{
		Name: "empty", OrgId: "acme", Visibility: vmv1.Visibility_VISIBILITY_PUBLIC, Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW,
		OsType: vmv1.OsType_OS_TYPE_LINUX, Architecture: vmv1.Architecture_ARCHITECTURE_X86_64, SourceUrl: "file://" + disk,
	})
	require.NoError(t, err)
	made, err := w.rest(1, token).Do(ctx, 8084, http.MethodPost, "/api/v1/vms", body("web", image))
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, made.Status, made.Raw)

	credit := creditv1.NewCreditServiceClient(w.admin.Conn())
	_, err = credit.CreateWallet(ctx, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "shop", InitialBalance: 1000})
	require.NoError(t, err)
	_, err = credit.CreateReservation(ctx, &creditv1.CreateReservationRequest{OrgId: "acme", ProjectId: "shop", ReservationId: keptReservation, Amount: 300, TtlSeconds: 3600})
	require.NoError(t, err)
	_, err = credit.CommitReservation(ctx, &creditv1.CommitReservationRequest{OrgId: "acme", ProjectId: "shop", ReservationId: keptReservation, ActualAmount: 120})
	require.NoError(t, err)

	_, err = w.admin.Identity.CreateServiceAccount(ctx, &identityv1.CreateServiceAccountRequest{Name: "deploy", OrgId: "acme", ProjectId: "shop", Roles: []string{"project:viewer"}})
	require.NoError(t, err)

	etcd := w.etcd(ctx)
	lease, err := etcd.Grant(ctx, 1_000_000_000)
	require.NoError(t, err)
	_, err = etcd.Put(ctx, "kept", "first")
	require.NoError(t, err)
	_, err = etcd.Put(ctx, "kept", "second", clientv3.WithLease(lease.ID))
	require.NoError(t, err)
	_, err = etcd.Put(ctx, "large", strings.Repeat("x", 100_000))
	require.NoError(t, err)
}

// keptReservation is the ID of the reservation that fill creates and commits, and that checkChanges commits again.
const keptReservation = "0b0f6a3e-3f5c-4c0e-9a53-0d6a5a1f9f11"

func (w *world) etcd(ctx context.Context) *clientv3.Client {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:50051"}, DialTimeout: 10 * time.Second, Context: ctx, Logger: zap.NewNop()})
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// checkRecords checks that the records and keys are those that fill created.
func (w *world) checkRecords() {
	t, ctx := w.t, w.context(time.Minute)
	vms, err := w.admin.VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "acme", ProjectId: "shop"})
	require.NoError(t, err)
	require.Len(t, vms.GetVms(), 1)
	require.Equal(t, "web", vms.GetVms()[0].GetName())
	require.Len(t, vms.GetVms()[0].GetSpec().GetDisks(), 1)
	images, err := w.admin.Images.ListImages(ctx, &vmv1.ListImagesRequest{OrgId: "acme"})
	require.NoError(t, err)
	require.Len(t, images.GetImages(), 1)
	require.Equal(t, vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE, images.GetImages()[0].GetStatus())
	nodes, err := w.admin.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
	require.NoError(t, err)
	require.Len(t, nodes.GetNodes(), 1)

	credit := creditv1.NewCreditServiceClient(w.admin.Conn())
	wallet, err := credit.GetWallet(ctx, &creditv1.GetWalletRequest{OrgId: "acme", ProjectId: "shop"})
	require.NoError(t, err)
	require.EqualValues(t, 880, wallet.GetBalance())
	require.Zero(t, wallet.GetReserved())
	audit, err := credit.AuditLedger(ctx, &creditv1.AuditLedgerRequest{})
	require.NoError(t, err)
	for {
		found, err := audit.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		require.Empty(t, found.GetProblem())
	}

	token, err := w.rest(2, "").IssueToken(ctx, "ada", "correct horse", nil)
	require.NoError(t, err)
	who, err := w.dial(3, token).Identity.WhoAmI(ctx, &identityv1.WhoAmIRequest{})
	require.NoError(t, err)
	require.Len(t, who.GetBindings(), 1)
	require.Equal(t, "shop", who.GetBindings()[0].GetProjectId())
	w.tenantToken = token
	accounts, err := w.admin.Identity.ListServiceAccounts(ctx, &identityv1.ListServiceAccountsRequest{OrgId: "acme", ProjectId: "shop"})
	require.NoError(t, err)
	require.Len(t, accounts.GetAccounts(), 1)
	records, err := w.admin.Identity.ListAuditRecords(ctx, &identityv1.ListAuditRecordsRequest{PageSize: 1000})
	require.NoError(t, err)
	require.NotEmpty(t, records.GetRecords())

	etcd := w.etcd(ctx)
	got, err := etcd.Get(ctx, "kept")
	require.NoError(t, err)
	require.Len(t, got.Kvs, 1)
	require.Equal(t, "second", string(got.Kvs[0].Value))
	require.EqualValues(t, 2, got.Kvs[0].Version)
	require.NotZero(t, got.Kvs[0].Lease)
	before, err := etcd.Get(ctx, "kept", clientv3.WithRev(got.Kvs[0].CreateRevision))
	require.NoError(t, err)
	require.Equal(t, "first", string(before.Kvs[0].Value))
	large, err := etcd.Get(ctx, "large")
	require.NoError(t, err)
	require.Len(t, large.Kvs[0].Value, 100_000)
}

// checkChanges checks that the records and keys can be changed, and that a repetition of the commit that fill made does
// not charge again.
func (w *world) checkChanges() {
	t, ctx := w.t, w.context(time.Minute)
	credit := creditv1.NewCreditServiceClient(w.admin.Conn())
	again, err := credit.CommitReservation(ctx, &creditv1.CommitReservationRequest{OrgId: "acme", ProjectId: "shop", ReservationId: keptReservation, ActualAmount: 120})
	require.NoError(t, err)
	require.EqualValues(t, 880, again.GetWallet().GetBalance())
	up, err := credit.TopUpWallet(ctx, &creditv1.TopUpWalletRequest{OrgId: "acme", ProjectId: "shop", Amount: 20})
	require.NoError(t, err)
	require.EqualValues(t, 900, up.GetWallet().GetBalance())
	vms, err := w.admin.VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "acme", ProjectId: "shop"})
	require.NoError(t, err)
	vm := vms.GetVms()[0]
	vm.Labels = map[string]string{"color": "blue"}
	changed, err := w.dial(2, w.tenantToken).VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{OrgId: "acme", ProjectId: "shop", VmId: vm.GetId(), Labels: vm.GetLabels()})
	require.NoError(t, err)
	require.Equal(t, "blue", changed.GetLabels()["color"])
	etcd := w.etcd(ctx)
	_, err = etcd.Put(ctx, "kept", "third")
	require.NoError(t, err)
	_, err = etcd.Delete(ctx, "large")
	require.NoError(t, err)
}

// pack writes a compressed tar archive of the cluster key and of the members' data directories to a file.
func (w *world) pack(path string) {
	require.NoError(w.t, os.MkdirAll(filepath.Dir(path), 0o755))
	f, err := os.Create(path)
	require.NoError(w.t, err)
	defer f.Close()
	z, err := zstd.NewWriter(f, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithEncoderConcurrency(1))
	require.NoError(w.t, err)
	out := tar.NewWriter(z)
	for _, top := range []string{"cluster.key", w.trio.Name(1), w.trio.Name(2), w.trio.Name(3)} {
		require.NoError(w.t, filepath.WalkDir(w.dir.Path(top), func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil || !info.Mode().IsRegular() && !info.IsDir() {
				return err
			}
			name, err := filepath.Rel(string(w.dir), path)
			if err != nil {
				return err
			}
			h := &tar.Header{Name: name, Mode: int64(info.Mode().Perm()), Typeflag: tar.TypeDir}
			var text []byte
			if info.Mode().IsRegular() {
				if text, err = os.ReadFile(path); err != nil {
					return err
				}
				h.Typeflag, h.Size = tar.TypeReg, int64(len(text))
			}
			if err := out.WriteHeader(h); err != nil {
				return err
			}
			_, err = out.Write(text)
			return err
		}))
	}
	require.NoError(w.t, errors.Join(out.Close(), z.Close()))
}

// unpack replaces the cluster key and the members' data directories by those of an archive that pack wrote.
func (w *world) unpack(path string) {
	f, err := os.Open(path)
	require.NoError(w.t, err)
	defer f.Close()
	z, err := zstd.NewReader(f)
	require.NoError(w.t, err)
	defer z.Close()
	in := tar.NewReader(z)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(w.t, err)
		to := w.dir.Path(h.Name)
		if h.Typeflag == tar.TypeDir {
			require.NoError(w.t, os.MkdirAll(to, 0o700))
		} else {
			text, err := io.ReadAll(in)
			require.NoError(w.t, err)
			require.NoError(w.t, os.WriteFile(to, text, fs.FileMode(h.Mode)))
		}
		require.NoError(w.t, os.Chown(to, lab.UID, lab.UID))
	}
}
