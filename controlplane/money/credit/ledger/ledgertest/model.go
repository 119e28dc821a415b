package ledgertest

import (
	"math/big"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// model is a naive ledger. It stores each reservation and charge and recomputes sums whenever they are needed. It
// shares no code with package ledger.
type model struct {
	wallets map[cloud.ProjectID]*modelWallet
}

type modelWallet struct {
	suspended, closed bool
	// in, charged and back are the total amounts deposited, charged and refunded. As big integers they cannot overflow.
	in, charged, back big.Int
	holds             map[string]*hold
	open              map[string]*hold
	// charges holds, for each charge, the amount that is not refunded yet. The key is the sequence number of the
	// charge.
	charges map[uint64]int64
	moves   uint64
}

type hold struct {
	amount, ttl int64
	says, kind  string
	until       cloud.Time
	end         string // "committed", "released" or "expired"; empty while it is pending
	took        int64
}

// verdict is the result of a command according to the model. The ledger under test must give the same result.
type verdict struct {
	ok       bool
	released bool
	moves    uint64
}

func (p *modelWallet) reserved() *big.Int {
	sum := new(big.Int)
	for _, h := range p.open {
		sum.Add(sum, big.NewInt(h.amount))
	}
	return sum
}

func (p *modelWallet) consumed() *big.Int { return new(big.Int).Sub(&p.charged, &p.back) }
func (p *modelWallet) balance() *big.Int  { return new(big.Int).Sub(&p.in, p.consumed()) }
func (p *modelWallet) available() *big.Int {
	return new(big.Int).Sub(p.balance(), p.reserved())
}

func (p *modelWallet) status() ledger.WalletStatus {
	switch {
	case p.closed:
		return ledger.Closed
	case p.suspended:
		return ledger.Suspended
	}
	return ledger.Active
}

func (p *modelWallet) has(amount int64) bool { return p.available().Cmp(big.NewInt(amount)) >= 0 }

func (p *modelWallet) fill(amount int64) bool {
	sum := new(big.Int).Add(&p.in, big.NewInt(amount))
	if !sum.IsInt64() {
		return false
	}
	p.in.Set(sum)
	p.moves++
	return true
}

func (p *modelWallet) take(amount int64) {
	p.charged.Add(&p.charged, big.NewInt(amount))
	p.moves++
	p.charges[p.moves] = amount
}

// do executes a command on the wallet of a project in the model, and returns the expected result.
func (m *model) do(project cloud.ProjectID, c ledger.Command) verdict {
	p := m.wallets[project]
	if c.Op == ledger.DoCreate {
		if p != nil || c.Amount < 0 {
			return verdict{}
		}
		p = &modelWallet{holds: map[string]*hold{}, open: map[string]*hold{}, charges: map[uint64]int64{}}
		m.wallets[project] = p
		if c.Amount > 0 {
			p.fill(c.Amount)
		}
		return verdict{ok: true, moves: p.moves}
	}
	if p == nil {
		return verdict{}
	}
	before := p.moves
	v := p.do(c)
	v.moves = p.moves - before
	return v
}

func (p *modelWallet) do(c ledger.Command) verdict {
	h := p.holds[c.Reservation]
	yes := verdict{ok: true}
	switch c.Op {
	case ledger.DoTopUp:
		return verdict{ok: !p.closed && c.Amount > 0 && p.fill(c.Amount)}
	case ledger.DoCharge:
		if p.closed || c.Amount <= 0 || !p.has(c.Amount) {
			return verdict{}
		}
		p.take(c.Amount)
		return yes
	case ledger.DoRefund:
		left, charge := p.charges[c.Charge]
		if p.closed || !charge || c.Amount <= 0 || c.Amount > left {
			return verdict{}
		}
		p.charges[c.Charge] = left - c.Amount
		p.back.Add(&p.back, big.NewInt(c.Amount))
		p.moves++
		return yes
	case ledger.DoSuspend, ledger.DoResume:
		if p.closed {
			return verdict{}
		}
		p.suspended = c.Op == ledger.DoSuspend
		return yes
	case ledger.DoClose:
		if len(p.open) > 0 {
			return verdict{}
		}
		p.closed = true
		return yes
	case ledger.DoReserve:
		return p.reserve(c, h)
	case ledger.DoCommit:
		return p.commit(c, h)
	case ledger.DoRelease:
		switch {
		case h == nil || h.end == "committed":
			return verdict{}
		case h.end == "released":
			return verdict{ok: true, released: true}
		case h.end == "expired" || c.At >= h.until:
			return yes
		}
		p.free(c.Reservation, "released")
		return verdict{ok: true, released: true}
	case ledger.DoExpire:
		switch {
		case h == nil:
			return verdict{}
		case h.end == "" && c.At >= h.until:
			p.free(c.Reservation, "expired")
		}
		return yes
	}
	return verdict{}
}

func (p *modelWallet) free(id, end string) {
	p.holds[id].end = end
	delete(p.open, id)
	p.moves++
}

func (p *modelWallet) reserve(c ledger.Command, h *hold) verdict {
	ttl := c.TTL
	if ttl == 0 {
		ttl = 300
	}
	if h != nil {
		return verdict{ok: h.amount == c.Amount && h.ttl == ttl && h.says == c.Description && h.kind == c.ResourceType}
	}
	if p.closed || p.suspended || c.Amount <= 0 || ttl < 0 || ttl > 30*24*3600 || !p.has(c.Amount) {
		return verdict{}
	}
	h = &hold{amount: c.Amount, ttl: ttl, says: c.Description, kind: c.ResourceType, until: c.At + ttl*1000}
	p.holds[c.Reservation], p.open[c.Reservation] = h, h
	p.moves++
	return verdict{ok: true}
}

func (p *modelWallet) commit(c ledger.Command, h *hold) verdict {
	if h == nil || c.Amount < 0 {
		return verdict{}
	}
	amount := c.Amount
	if amount == 0 {
		amount = h.amount
	}
	if h.end == "committed" {
		return verdict{ok: amount == h.took}
	}
	if h.end != "" || c.At >= h.until || amount > h.amount {
		return verdict{}
	}
	p.take(amount)
	h.took = amount
	if amount < h.amount {
		p.moves++
	}
	h.end = "committed"
	delete(p.open, c.Reservation)
	return verdict{ok: true}
}
