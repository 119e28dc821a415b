package node

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/scrape"
)

const (
	// maxProblem is the maximum length, in bytes, of the reason why a host does not support RBD or another feature.
	maxProblem = 200
	// maxFeatures is the maximum number of features of virtual machines that a host reports.
	maxFeatures = 32
)

var validFeature = regexp.MustCompile(`^[a-z0-9-]{1,64}$`)

// hostFacts holds properties of a host that its agent reports once per session: CPU models, QEMU version, architecture,
// storage pools, whether the host serves RBD and takes part in live migrations, features of virtual machines, and the
// boot ID of its kernel, and the URL of its metrics.
type hostFacts struct {
	models       []string
	qemu         string
	architecture cloud.Architecture
	pools        []cloud.StoragePool
	rbd          bool
	rbdProblem   string
	rbdEncrypts  bool
	migrates     bool
	features     map[string]string
	hugepages    uint64
	bootID       string
	dedicated    uint32
	metricsURL   string
}

func factsOf(n *cloud.Node) hostFacts {
	return hostFacts{
		n.CPUModels, n.QEMUVersion, n.Architecture, n.StoragePools, n.RBD, n.RBDProblem, n.RBDEncryption, n.LiveMigration,
		n.Features, n.HugepagesMiB, n.BootID, n.DedicatedCPUs, n.MetricsURL,
	}
}

func (f hostFacts) equal(g hostFacts) bool {
	return slices.Equal(f.models, g.models) && f.qemu == g.qemu && f.architecture == g.architecture &&
		slices.Equal(f.pools, g.pools) && f.rbd == g.rbd && f.rbdProblem == g.rbdProblem &&
		f.rbdEncrypts == g.rbdEncrypts && f.migrates == g.migrates && maps.Equal(f.features, g.features) && f.hugepages == g.hugepages &&
		f.bootID == g.bootID && f.dedicated == g.dedicated && f.metricsURL == g.metricsURL
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
	if err := checkWords("facts.boot_id", f.GetBootId()); err != nil {
		return hostFacts{}, err
	}
	if f.GetArchitecture() < 0 || f.GetArchitecture() > vmv1.Architecture(cloud.AArch64) {
		return hostFacts{}, fault.Invalid("facts.architecture", "unknown value %d", f.GetArchitecture())
	}
	pools, err := checkPools(f.GetStoragePools())
	if err != nil {
		return hostFacts{}, err
	}
	if err := checkProblem("facts.rbd_problem", f.GetRbdProblem()); err != nil {
		return hostFacts{}, err
	}
	if f.GetHugepagesMib() > maxCapacity.MemoryMiB {
		return hostFacts{}, fault.Invalid("facts.hugepages_mib", "at most %d", maxCapacity.MemoryMiB)
	}
	if f.GetDedicatedCpus() > maxDedicatedCPUs {
		return hostFacts{}, fault.Invalid("facts.dedicated_cpus", "at most %d", maxDedicatedCPUs)
	}
	if err := scrape.CheckURL(f.GetMetricsUrl()); err != nil {
		return hostFacts{}, fault.Invalid("facts.metrics_url", "%v", err)
	}
	features, err := checkFeatures(f.GetMachineFeatures())
	if err != nil {
		return hostFacts{}, err
	}
	return hostFacts{
		f.GetCpuModels(), f.GetQemuVersion(), cloud.Architecture(f.GetArchitecture()), pools, f.GetRbd(), f.GetRbdProblem(),
		f.GetRbdEncryption(), f.GetLiveMigration(), features, f.GetHugepagesMib(), f.GetBootId(), f.GetDedicatedCpus(),
		f.GetMetricsUrl(),
	}, nil
}

func checkProblem(field, problem string) error {
	if len(problem) > maxProblem || strings.ContainsFunc(problem, unicode.IsControl) {
		return fault.Invalid(field, "one line of at most %d bytes", maxProblem)
	}
	return nil
}

// checkFeatures checks the features of virtual machines that a host reports, and returns the problem of each by name.
func checkFeatures(all []*agentv1.MachineFeature) (map[string]string, error) {
	const field = "facts.machine_features"
	if len(all) > maxFeatures {
		return nil, fault.Invalid(field, "at most %d", maxFeatures)
	}
	var features map[string]string
	for _, f := range all {
		if _, twice := features[f.GetName()]; twice || !validFeature.MatchString(f.GetName()) {
			return nil, fault.Invalid(field, "the name of a feature is invalid or occurs twice")
		}
		if err := checkProblem(field, f.GetProblem()); err != nil {
			return nil, err
		}
		if features == nil {
			features = map[string]string{}
		}
		features[f.GetName()] = f.GetProblem()
	}
	return features, nil
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
		n.RBDEncryption, n.LiveMigration, n.Features = waiting.rbdEncrypts, waiting.migrates, waiting.features
		n.HugepagesMiB, n.BootID, n.DedicatedCPUs = waiting.hugepages, waiting.bootID, waiting.dedicated
		n.MetricsURL = waiting.metricsURL
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
