package node

import (
	"context"
	"slices"
	"strings"
	"unicode"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// maxRBDProblem is the maximum length, in bytes, of the reason why a host does not serve RBD.
const maxRBDProblem = 200

// hostFacts holds properties of a host that its agent reports once per session: CPU models, QEMU version, architecture,
// storage pools, and whether the host serves RBD and takes part in live
// migrations.
type hostFacts struct {
	models       []string
	qemu         string
	architecture cloud.Architecture
	pools        []cloud.StoragePool
	rbd          bool
	rbdProblem   string
	rbdEncrypts  bool
	migrates     bool
}

func factsOf(n *cloud.Node) hostFacts {
	return hostFacts{n.CPUModels, n.QEMUVersion, n.Architecture, n.StoragePools, n.RBD, n.RBDProblem, n.RBDEncryption, n.LiveMigration}
}

func (f hostFacts) equal(g hostFacts) bool {
	return slices.Equal(f.models, g.models) && f.qemu == g.qemu && f.architecture == g.architecture &&
		slices.Equal(f.pools, g.pools) && f.rbd == g.rbd && f.rbdProblem == g.rbdProblem &&
		f.rbdEncrypts == g.rbdEncrypts && f.migrates == g.migrates
}

// checkFacts converts the facts that a host reports. It returns InvalidArgument if they are too large to store or have
// unknown values.
func checkFacts(f *agentv1.NodeFacts) (hostFacts, error) {
	if len(f.GetCpuModels()) > maxModels {
		return hostFacts{}, fault.Invalid("facts.cpu_models", "at most %d", maxModels)
	}
	total := 0
	for _, m := range f.GetCpuModels() {
		total += len(m)
	}
	if total > maxModelBytes {
		return hostFacts{}, fault.Invalid("facts.cpu_models", "at most %d bytes together", maxModelBytes)
	}
	if err := checkWords("facts.cpu_models", f.GetCpuModels()...); err != nil {
		return hostFacts{}, err
	}
	if err := checkWords("facts.qemu_version", f.GetQemuVersion()); err != nil {
		return hostFacts{}, err
	}
	if f.GetArchitecture() < 0 || f.GetArchitecture() > vmv1.Architecture(cloud.AArch64) {
		return hostFacts{}, fault.Invalid("facts.architecture", "unknown value %d", f.GetArchitecture())
	}
	pools, err := checkPools(f.GetStoragePools())
	if err != nil {
		return hostFacts{}, err
	}
	if problem := f.GetRbdProblem(); len(problem) > maxRBDProblem || strings.ContainsFunc(problem, unicode.IsControl) {
		return hostFacts{}, fault.Invalid("facts.rbd_problem", "one line of at most %d bytes", maxRBDProblem)
	}
	return hostFacts{
		f.GetCpuModels(), f.GetQemuVersion(), cloud.Architecture(f.GetArchitecture()), pools, f.GetRbd(), f.GetRbdProblem(),
		f.GetRbdEncryption(), f.GetLiveMigration(),
	}, nil
}

// receiveFacts checks the facts (CPU models, QEMU version, architecture, storage pools) that a host reports once per
// session, and writes them to the host's record if they differ. If facts were written less than minUpdateInterval ago,
// the new facts wait in the host's budget, where later facts replace them. The first heartbeat after that time writes
// them.
func (s *Service) receiveFacts(ctx context.Context, id cloud.NodeID, f *agentv1.NodeFacts) error {
	stated, err := checkFacts(f)
	if err != nil {
		return err
	}
	b := s.budgetOf(id)
	s.mu.Lock()
	known, ok := s.nodes[id]
	if b.pendingFacts = &stated; ok && stated.equal(factsOf(&known)) {
		b.pendingFacts = nil
	}
	s.mu.Unlock()
	return s.recordFacts(ctx, id, b)
}

// recordFacts writes the pending facts in b to the host's record if minUpdateInterval has passed since the last write
// of facts.
func (s *Service) recordFacts(ctx context.Context, id cloud.NodeID, b *budget) error {
	s.mu.Lock()
	waiting := b.pendingFacts
	s.mu.Unlock()
	if waiting == nil {
		return nil
	}
	_, inTurn, err := s.updateNodeThrottled(ctx, id, &b.lastFacts, func(n *cloud.Node) {
		n.CPUModels, n.QEMUVersion, n.Architecture = waiting.models, waiting.qemu, waiting.architecture
		n.StoragePools, n.RBD, n.RBDProblem = waiting.pools, waiting.rbd, waiting.rbdProblem
		n.RBDEncryption, n.LiveMigration = waiting.rbdEncrypts, waiting.migrates
	})
	if inTurn && err == nil {
		s.mu.Lock()
		if b.pendingFacts == waiting {
			b.pendingFacts = nil
		}
		s.mu.Unlock()
	}
	return err
}
