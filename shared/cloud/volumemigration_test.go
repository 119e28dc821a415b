package cloud

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// volumeMigration migrates a VM with an RBD volume between the hosts n1, n2 and n3.
type volumeMigration struct {
	*testing.T
	vm     VM
	volume Volume
	// writers has the host that got each attachment generation for writing.
	writers map[uint64]NodeID
}

func newVolumeMigration(t *testing.T) *volumeMigration {
	m := &volumeMigration{
		T: t, vm: VM{ID: "a", Name: "a", Node: "n1", State: Running, Desired: Desired{On: true}},
		volume: Volume{Name: "v", Driver: DriverRBD, AttachmentGeneration: 2, FlushedGeneration: 2, Generation: 7}, writers: map[uint64]NodeID{},
	}
	require.NoError(t, m.volume.Attach("a", "d", "n1"))
	m.check()
	return m
}

// check checks that a host cannot have the volume with the generation of another host, and that only the VM's host may
// write to it.
func (m *volumeMigration) check() {
	m.Helper()
	v := &m.volume
	require.Equal(m, m.vm.Node, v.Node)
	require.Equal(m, m.vm.OtherHost(), v.Other)
	if had := m.writers[v.AttachmentGeneration]; had != "" && had != v.Node {
		m.Fatalf("two hosts may write with generation %d: %s and %s", v.AttachmentGeneration, had, v.Node)
	}
	m.writers[v.AttachmentGeneration] = v.Node
	if v.StandbyGeneration > 0 {
		require.Empty(m, m.writers[v.StandbyGeneration], "the reserved generation was given to a host before")
		require.Greater(m, v.StandbyGeneration, v.AttachmentGeneration)
	}
}

// report applies the report of a host, and all steps that follow.
func (m *volumeMigration) report(host NodeID, s MigrationState) {
	m.Helper()
	m.vm.ObserveMigration(host, Observation{Generation: m.vm.Generation, Observed: ObservedRunning,
		Migration: &MigrationObservation{Attempt: m.vm.Migration.Attempt, State: s, Machine: []byte("m")}})
	m.advance(0)
}

func (m *volumeMigration) advance(facts MigrationFacts) {
	m.Helper()
	for m.vm.AdvanceMigration(facts, 0) != MigrationWait {
		m.volume.SetHosts(m.vm.Node, m.vm.OtherHost())
		m.check()
	}
}

// TestVolumeOfMigration runs the scripts in testdata/volumemigration. `begin` begins a migration to a host. The reports of
// the hosts are those of TestMigration, as `<host> <state>`. `fenced` is the fact that the target is fenced. Each command
// prints what the hosts may do with the volume.
func TestVolumeOfMigration(t *testing.T) {
	datadriven.Walk(t, "testdata/volumemigration", func(t *testing.T, path string) {
		m := newVolumeMigration(t)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			m.T = t
			switch d.Cmd {
			case "begin":
				require.NoError(t, m.vm.BeginMigration(NodeID(d.CmdArgs[0].Key), 1000, 0))
				m.volume.SetHosts(m.vm.Node, m.vm.OtherHost())
				m.check()
			case "cancel":
				require.True(t, m.vm.CancelMigration())
				m.advance(0)
			case "fenced":
				m.advance(TargetFenced)
			case "lose-host":
				require.NoError(t, m.vm.LoseHost(0))
				m.volume.EndLostAttachment()
			case "attach":
				m.volume.FlushedGeneration = m.volume.AttachmentGeneration
				require.NoError(t, m.volume.Attach("a", "d", NodeID(d.CmdArgs[0].Key)))
			default:
				m.report(NodeID(d.Cmd), migrationStates[d.CmdArgs[0].Key])
			}
			return m.rights()
		})
	})
}

// rights describes what the hosts may do with the volume.
func (m *volumeMigration) rights() string {
	v := &m.volume
	out := []string{fmt.Sprintf("%s writes with %d", v.Node, v.AttachmentGeneration)}
	if v.Migrated {
		out[0] += " (migrated)"
	}
	switch {
	case v.StandbyGeneration > 0:
		out = append(out, fmt.Sprintf("%s prepares %d", v.Other, v.StandbyGeneration))
	case v.Other != "":
		out = append(out, string(v.Other)+" must not write")
	}
	return strings.Join(out, ", ") + "\n"
}

// TestVolumeMigrationFeatures checks that an encrypted file needs agents that pass its key to QEMU again.
func TestVolumeMigrationFeatures(t *testing.T) {
	for _, v := range []Volume{{Driver: DriverManaged}, {Driver: DriverRBD, Encrypted: true}} {
		require.Equal(t, []string{FeatureVolumeMigration}, v.MigrationFeatures())
	}
	encrypted := Volume{Driver: DriverManaged, Encrypted: true}
	require.Equal(t, []string{FeatureVolumeMigration, FeatureEncryptedMigration}, encrypted.MigrationFeatures())
}

// TestVolumesNotMigratable checks for which volumes a VM cannot be migrated, and for which ones only later.
func TestVolumesNotMigratable(t *testing.T) {
	for _, c := range []struct {
		volume       Volume
		never, later string
	}{
		{Volume{Driver: DriverRBD, Encrypted: true}, "", ""},
		{Volume{Driver: DriverManaged, PoolID: "p"}, "", ""},
		{Volume{Driver: DriverManaged, Pool: "local"}, "only its host can use", ""},
		{Volume{Driver: DriverManaged, PoolID: "p", Encrypted: true}, "", ""},
		{Volume{Driver: DriverManaged, PoolID: "p", Ending: true}, "", "has not ended"},
		{Volume{Driver: DriverRBD, Flatten: true}, "", "being made independent"},
	} {
		require.Contains(t, c.volume.NotMigratable(), c.never)
		require.Equal(t, c.never == "", c.volume.NotMigratable() == "")
		require.Contains(t, c.volume.MigratableLater(), c.later)
		require.Equal(t, c.later == "", c.volume.MigratableLater() == "")
	}
}
