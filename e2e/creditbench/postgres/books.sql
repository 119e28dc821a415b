-- The sums of package books, and last how many wallets do not add up: the journal's fold is the balance and every
-- balance_after, sequences have no gap, what is held is what pending reservations hold.
with moved as (
	select project, sequence, balance_after,
		sum(case type when 1 then amount when 3 then -amount else 0 end) over (partition by project order by sequence) as balance,
		row_number() over (partition by project order by sequence) as place
	from journal
), folded as (
	select project, count(*) as transactions, bool_and(balance = balance_after and place = sequence) as good,
		(array_agg(balance order by sequence desc))[1] as balance
	from moved group by project
), holding as (
	select project, count(*) as reservations, coalesce(sum(amount) filter (where status = 1), 0) as held, count(*) filter (where status = 1) as pending
	from reservation group by project
)
select count(*)::bigint, coalesce(sum(f.transactions), 0)::bigint, coalesce(sum(h.reservations), 0)::bigint, coalesce(sum(w.deposited), 0)::bigint,
	coalesce(sum(w.consumed), 0)::bigint, coalesce(sum(w.held), 0)::bigint, coalesce(sum(w.available + w.held), 0)::bigint,
	count(*) filter (where not (f.good and f.balance = w.available + w.held and f.transactions = w.sequence
		and coalesce(h.held, 0) = w.held and coalesce(h.pending, 0) = w.pending) is true)::bigint
from wallet w left join folded f using (project) left join holding h using (project)
