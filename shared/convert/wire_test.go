package convert

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// fill sets every field of a message to a non-zero value, recursively. Of each oneof it sets only the field with the
// index oneof.
func fill(m protoreflect.Message, oneof int, n *int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if o := f.ContainingOneof(); o != nil && o.Fields().Get(oneof%o.Fields().Len()) != f {
			continue
		}
		switch {
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("k").MapKey(), protoreflect.ValueOfString("v"))
		case f.IsList() && f.Message() != nil:
			fill(m.Mutable(f).List().AppendMutable().Message(), oneof, n)
		case f.IsList():
			m.Mutable(f).List().Append(scalar(f, n))
		case f.Message() != nil:
			fill(m.Mutable(f).Message(), oneof, n)
		default:
			m.Set(f, scalar(f, n))
		}
	}
}

func scalar(f protoreflect.FieldDescriptor, n *int) protoreflect.Value {
	*n++
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(fmt.Sprint("s", *n))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(fmt.Append(nil, "b", *n))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(*n))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(*n))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(*n))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(*n))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(*n))
	}
	panic("no value for " + f.FullName())
}

func filled[M proto.Message](m M, oneof int) M {
	n := 0
	fill(m.ProtoReflect(), oneof, &n)
	return m
}

// TestRoundTrips converts messages with all fields set to domain values and back. The result must equal the message, so
// that no field is lost.
func TestRoundTrips(t *testing.T) {
	for oneof := range 3 {
		spec := filled(&vmv1.VmSpec{}, oneof)
		got := SpecFrom(spec)
		require.Empty(t, cmp(spec, Spec(&got)))
	}
	o := filled(&agentv1.VmObservation{}, 0)
	require.Empty(t, cmp(o, Observation(ObservationFrom(o))))
	ov := filled(&agentv1.VolumeObservation{}, 0)
	require.Empty(t, cmp(ov, VolumeObservation(VolumeObservationFrom(ov))))
	usage := filled(&vmv1.ResourceUsage{}, 0)
	require.Empty(t, cmp(usage, Usage(UsageFrom(usage))))

	heartbeat := filled(&vmv1.HeartbeatNodeRequest{}, 0)
	node := NodeFrom(heartbeat)
	shown := Node(&node, node.Declared, 7)
	back := &vmv1.HeartbeatNodeRequest{
		NodeId: shown.Id, Name: shown.Name, State: shown.State, Capacity: shown.Capacity, Allocatable: shown.Allocatable,
		Hypervisors: shown.Hypervisors, Labels: shown.Labels, AgentVersion: shown.AgentVersion,
		SupportedVolumeDrivers: shown.SupportedVolumeDrivers, SupportedStorageClasses: shown.SupportedStorageClasses,
		SharedLiveMigration: shown.SharedLiveMigration,
	}
	require.Empty(t, cmp(heartbeat, back))
}

// TestResponsesSetEveryField checks that a message made from a domain value with all fields set has no empty field.
func TestResponsesSetEveryField(t *testing.T) {
	spec := SpecFrom(filled(&vmv1.VmSpec{}, 0))
	vm := cloud.VM{
		ID: "i", Name: "n", Org: "o", Project: "p", State: cloud.Running, Spec: spec, Node: "n1", Hypervisor: cloud.KVM,
		CreatedAt: 1, UpdatedAt: 2, CreatedBy: "u", Metadata: map[string]string{cloud.MetadataTokens: "optional", cloud.OSTypeKey: "windows"}, Labels: map[string]string{"c": "d"},
		Status:  cloud.Status{Actual: cloud.Running, PID: 1, StartedAt: 2, Addresses: []string{"a"}, LastError: "e"},
		Desired: cloud.Desired{On: true, GraceMS: 1, Starts: 1, Reboots: 1, Resets: 1}, Generation: 3,
	}
	vm.Spec.Network[0].MTU = 1450
	vm.RolledBack, vm.Metadata[cloud.CPUPolicyKey] = 2, "dedicated"
	image := &cloud.ImageRef{ID: "x", SHA256: "h", SizeBytes: 1, Format: cloud.FormatRaw}
	vm.Kernel, vm.Initrd, vm.CDROM = image, image, image
	vm.Spec.Disks[0].ID = "d"
	vm.Disks = []cloud.ResolvedDisk{{ID: "d", SizeBytes: 1, Bus: cloud.BusSATA, Cache: cloud.CacheNone, Image: image}}
	full := cloud.Usage{CPUPercent: 1, MemoryMiB: 1, DiskReadBytes: 1, DiskWriteBytes: 1, NetworkReceivedBytes: 1, NetworkTransmitBytes: 1}
	requireFull(t, VM(&vm, &full).ProtoReflect())
	assigned := Assigned(&vm)
	assigned.Seed = &agentv1.AssignedSeed{HostName: "h", SshKeys: []string{"k"}, UserData: []byte("u"), Nics: []*agentv1.AssignedSeedNic{{ // set by package vm
		NicId: "n", Dhcp: true, Addresses: []string{"a"}, Gateways: []string{"g"}, DnsServers: []string{"d"}, Domain: "d", Mtu: 1450,
	}}}
	assigned.StopsWithLease = true                                // set by package vm
	assigned.Disks[0].Volume = AssignedVolume(fullVolume(), "h1") // set by package vm
	assigned.Disks[0].Volume.Standby = AssignedVolume(fullVolume(), "h2").Standby
	assigned.Disks[0].Volume.Deleted, assigned.Disks[0].Volume.EncryptionKey = true, []byte("k")
	assigned.Disks[0].Volume.CheckImage = true                                                                          // only before the volume is present
	assigned.Disks[0].Volume.Snapshots = []*agentv1.AssignedSnapshot{filled(&agentv1.AssignedSnapshot{}, 0)}            // set by package volume
	assigned.Disks[0].Volume.Rbd = &agentv1.RbdPool{Fsid: "x", Monitors: []string{"x"}, Pool: "x", User: "x", Key: "x"} // set by package volume
	m := &cloud.Migration{Attempt: 3, Source: "h1", Target: "h2", Phase: cloud.MigrationTransfer, Machine: []byte("q35"), Address: "a:1",
		SendRunning: true, MemoryChannels: 4}
	assigned.Migration = AssignedMigration(m, "h1")
	target := AssignedMigration(m, "h2")
	require.Equal(t, []string{"h2", "h1", "a:1", ""}, []string{assigned.Migration.PeerNodeId, target.PeerNodeId, assigned.Migration.PeerAddress, target.PeerAddress})
	require.Empty(t, assigned.Migration.Machine)
	assigned.Migration.Machine = target.Machine                                   // set for the target
	assigned.Migration.MaxBytesPerSecond, assigned.Migration.MaxDowntimeMs = 1, 1 // the agent's defaults apply
	assigned.Rescue = assigned.Disks[0]                                           // only without a kernel
	requireFull(t, assigned.ProtoReflect())
	created := ImageFrom(filled(&vmv1.CreateImageRequest{}, 0))
	require.Equal(t, "s10", created.Source)
	created.ID, created.SizeBytes, created.SHA256, created.Status, created.CreatedAt, created.UpdatedAt = "i", 1, "h", cloud.ImageAvailable, 1, 2
	requireFull(t, Image(&created).ProtoReflect())
}

// fullVolume returns a volume of which no field is empty.
func fullVolume() *cloud.Volume {
	return &cloud.Volume{
		ID: "v", Name: "n", Org: "o", Project: "p", SizeGiB: 1, Driver: cloud.DriverManaged, Class: "c", Format: cloud.VolumeRaw, Pool: "l",
		ClassLimits: cloud.Limits{IOPS: 1, BytesPerSecond: 1}, Image: &cloud.ImageRef{ID: "x", SHA256: "h", SizeBytes: 1, Format: cloud.FormatRaw},
		CreatedAt: 1, UpdatedAt: 2, CreatedBy: "u", Metadata: map[string]string{"a": "b"}, Labels: map[string]string{"c": "d"}, Node: "h1",
		Encrypted: true, ExternalImage: "disk",
		Flatten: true, FlattenPercent: 10, Fence: true, Other: "h2", StandbyGeneration: 3, Granted: 3, Migrated: true,
		Source: &cloud.SnapshotRef{Volume: "w", Snapshot: "s"}, VM: "m", Disk: "d", Generation: 1, AttachmentGeneration: 2, FlushedGeneration: 1, Present: true, LastError: "e",
	}
}

// TestSnapshots checks that the message of a snapshot record with all fields set has no empty field.
func TestSnapshots(t *testing.T) {
	s := cloud.Snapshot{
		ID: "s", Name: "n", Org: "o", Project: "p", Volume: "v", Group: "g", GroupVolumes: []cloud.VolumeID{"v"}, SizeGiB: 1,
		Labels: map[string]string{"a": "b"}, CreatedAt: 1, Scheduled: true, Deadline: 2, Status: cloud.SnapshotError, Reason: "r",
		Consistency: cloud.ConsistencyCrash, TakenAt: 3, StoredBytes: 4,
	}
	requireFull(t, Snapshot(&s).ProtoReflect())
	sent := AssignedSnapshot(&s)
	require.Equal(t, []string{"s", "g", "v"}, append([]string{sent.SnapshotId, sent.GroupId}, sent.GroupVolumes...))
	require.True(t, sent.MustExist)
	s.Deleted = true
	require.Empty(t, cmp(&agentv1.AssignedSnapshot{SnapshotId: "s", Deleted: true}, AssignedSnapshot(&s)))
	unknown := snapshotObservationFrom(&agentv1.SnapshotObservation{State: 900, Consistency: 7, Format: 9})
	require.Equal(t, cloud.SnapshotObservation{State: 255}, unknown)
}

func requireFull(t *testing.T, m protoreflect.Message) {
	t.Helper()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.ContainingOneof() != nil {
			continue
		}
		require.True(t, m.Has(f), "%s is empty", f.FullName())
		if f.Message() == nil || f.IsMap() {
			continue
		}
		if f.IsList() {
			requireFull(t, m.Get(f).List().Get(0).Message())
		} else {
			requireFull(t, m.Get(f).Message())
		}
	}
}

// TestUnknownEnumValuesStayUnknown checks that numbers outside of an enumeration are not converted to a known value,
// for example by overflow of uint8.
func TestUnknownEnumValuesStayUnknown(t *testing.T) {
	for _, n := range []vmv1.DiskBus{-1, 256, 257, 1 << 30} {
		require.Greater(t, DiskFrom(&vmv1.DiskSpec{Bus: n}).Bus, cloud.BusSATA, "%d", n)
	}
}

// TestEnumerationsMatch checks that each enumeration of the domain has the same numbers as that of the protos, because
// package convert converts by a cast.
func TestEnumerationsMatch(t *testing.T) {
	for name, value := range vmv1.VmState_value {
		require.Equal(t, "VM_STATE_"+cloud.State(value).String(), name)
	}
	for name, value := range vmv1.NodeState_value {
		require.Equal(t, "NODE_STATE_"+cloud.NodeState(value).String(), name)
	}
	for name, value := range vmv1.ImageStatus_value {
		require.Equal(t, "IMAGE_STATUS_"+cloud.ImageStatus(value).String(), name)
	}
	for got, want := range map[any]any{
		cloud.ObservedEnded: agentv1.Observed_OBSERVED_ENDED, cloud.ObservedBuildFailed: agentv1.Observed_OBSERVED_BUILD_FAILED,
		cloud.ExitFailed: agentv1.Exit_EXIT_FAILED, cloud.BusSATA: vmv1.DiskBus_DISK_BUS_SATA,
		cloud.CacheWritethrough: vmv1.DiskCache_DISK_CACHE_WRITETHROUGH, cloud.FormatVHD: vmv1.ImageFormat_IMAGE_FORMAT_VHD,
		cloud.Shared: vmv1.Visibility_VISIBILITY_SHARED, cloud.AltVMM: vmv1.HypervisorType_HYPERVISOR_TYPE_ALTVMM,
		cloud.ModelE1000: vmv1.NicModel_NIC_MODEL_E1000, cloud.AArch64: vmv1.Architecture_ARCHITECTURE_AARCH64,
	} {
		require.EqualValues(t, reflect.ValueOf(want).Int(), reflect.ValueOf(got).Uint())
	}
}

func cmp(want, got proto.Message) string {
	if proto.Equal(want, got) {
		return ""
	}
	return fmt.Sprintf("want %v\ngot  %v", want, got)
}
