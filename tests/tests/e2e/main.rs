//! The end-to-end tests: the real programs on a real Postgres and a real Kafka.
//!
//! | module | shows |
//! |---|---|
//! | [`envelope`] | what is inserted by SQL alone is what any Kafka consumer reads |
//! | [`late`] | what commits late, in every way there is, is published and in the order of its key |
//! | [`bulk`] | one transaction's many late messages hold up nobody, in bounded memory |
//! | [`memory`] | memory is bounded, and shards that stand still take nothing from the others |
//! | [`partitions`] | keys land where Java's own producer puts them |
//! | [`ownership`] | one owner a generation: kills, hand-overs, cut connections |
//! | [`claims`] | the rules of ownership at their edges, by the relay's own statements |
//! | [`takeover`] | how long nobody publishes a shard after a kill and after SIGTERM |
//! | [`guards`] | what an administrator or a restore can break is refused with what to do, and once mended nothing is lost |
//! | [`doctor`] | `baton doctor` finds what was broken, each with its advice, and nothing in a healthy site |
//! | [`pooler`] | behind a pooler in session mode everything works; in another mode a relay refuses |
//! | [`story`] | the recovery story, with a stopped and a killed process |
//! | [`endurance`] | what an operator breaks for a moment is named and ridden out |
//! | [`zombies`] | a relay stopped past its lease and continued changes nothing |
//! | [`held`] | the fault table: each fault at each point of a relay's work |
//! | [`refusals`] | what Kafka refuses parks its topic and key and holds up nothing else |
//! | [`parking`] | what becomes of it then: order, budget, bound, what operators do |
//! | [`parking_held`] | a relay killed at any point around parking and retrying loses and reorders nothing |
//! | [`poison`] | many poison keys of every kind hold up no other, and all arrive once they are mended |
//! | [`rebase`] | an outbox that moves to another cluster skips nothing and repeats what was foretold |
//! | [`retention`] | space comes back, never at the cost of a message, a producer or a dump |
//! | [`lifecycles`] | the database knows the words of the lifecycles, and decides as the rule of a lease does |
//! | [`status`] | the JSON of `baton status` |
//! | [`seen`] | what a relay serves over HTTP, whatever is away |
//! | [`effects`] | a consumer applies each message once, whatever it is fed and whenever it dies |
//! | [`consumer_held`] | the consumer's fault table: each fault at each point of its work on a message, in both ways of owning it |
//! | [`dead_letters`] | what reads a dead letter that is not ours: Kafka's console consumer, a program with Kafka's own client |
//! | [`inbox_commands`] | `baton inbox`: what an operator sees of a consumer, and decides |
//! | [`consumer_planted`] | bugs planted into the consumer are found, each as what it is |
//! | [`replay`] | dead letters are chosen, counted, sent again and told of, and each takes effect once |
//! | [`republish`] | what was published goes once more as it went, and nothing else does or changes |
//! | [`bad_input`] | one clear message, the right exit code, no password |
//! | [`plans`] | what a poll costs does not depend on what waits or stays open |
//! | [`ring`] | what an advance costs does not grow under a held snapshot |
//! | [`faults`] | one fault at a time: servers that die, hang, answer slowly, refuse or forget |
//! | [`guarantees`] | `docs/guarantees.md` promises nothing without a test |
//! | [`under_fire`] | nothing is lost, forged or reordered while everything is killed |
//! | [`planted`] | bugs planted into the relay are found, each as what it is |

mod bad_input;
mod bulk;
mod claims;
mod consumer_held;
mod consumer_planted;
mod crash_only;
mod dead_letters;
mod doctor;
mod effects;
mod endurance;
mod envelope;
mod faults;
mod guarantees;
mod guards;
mod held;
mod inbox_commands;
mod late;
mod leases;
mod lifecycles;
mod memory;
mod ownership;
mod parking;
mod parking_held;
mod partitions;
mod plans;
mod planted;
mod poison;
mod pooler;
mod rebase;
mod refusals;
mod replay;
mod republish;
mod retention;
mod ring;
mod seen;
mod status;
mod story;
mod takeover;
mod under_fire;
mod zombies;
