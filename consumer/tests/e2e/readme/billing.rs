use baton_consumer::{BoxError, Consumer, Delivery, Handler, Json, Kafka, Verdict};
use sqlx::{PgPool, Postgres, Transaction};

#[derive(serde::Deserialize)]
struct Order {
    order_id: String,
    amount_cents: i64,
}

struct Billing;

impl Handler for Billing {
    type Payload = Json<Order>; // anything serde can read; `Raw` for bytes

    async fn handle(&self, delivery: &Delivery<Json<Order>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let Json(order) = delivery.payload();
        let invoice = sqlx::query("INSERT INTO invoice (order_id, amount_cents) VALUES ($1, $2)");
        match invoice.bind(&order.order_id).bind(order.amount_cents).execute(&mut **tx).await {
            Ok(_) => Verdict::done(),
            Err(error) => error.into(), // an sqlx error knows whether trying again can help
        }
    }
}

pub(super) async fn bill(pool: PgPool, kafka: Kafka, topic: &str) -> Result<(), BoxError> {
    let shutdown = async { drop(tokio::signal::ctrl_c().await) };
    let consumer =
        Consumer::builder("billing", pool, kafka).topics([topic]).transactional(Billing).build()?;
    Ok(consumer.run(shutdown).await?)
}
